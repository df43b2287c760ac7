"""Packages that only some formats need: asked for at the moment of use, with an answer that says how to get them."""

import importlib
from typing import Any

from partitioning.declaration import DeclarationError


def needed(module: str, package: str, what: str) -> Any:
    """Imports a module of the extra `data`.

    Args:
      what: what the user asked for that needs it, to begin the message with.

    Raises:
      DeclarationError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DeclarationError(
            f"{what} needs the package {package}, which is not installed; pip install 'jaxlm[data]', or pip install {package}."
        ) from None
