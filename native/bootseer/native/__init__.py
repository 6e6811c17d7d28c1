"""The C++ data plane. Importing this needs the compiled extension."""

from bootseer.native import _core
from bootseer.native._core import ReadFile

__all__ = ["ReadFile", "_core"]
