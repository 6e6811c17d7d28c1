"""Leaf package: errors, units, wire records, paths. Imports nothing of ours."""
