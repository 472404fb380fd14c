"""What we set in the environment for libraries of our own, and the environment as the user gave it."""

from __future__ import annotations

import os

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""What tells the libraries that multiply matrices how many threads to use, before NumPy is imported.

One is measured to be faster for products that stay in the cache, and others would take memory for every core.
"""

_ONE = "1"
_ours: set[str] = set()


def limit_threads() -> None:
    """Have one thread multiply matrices, unless the user has said how many."""
    for name in BLAS_THREADS:
        if name not in os.environ:
            os.environ[name] = _ONE
            _ours.add(name)


def of_the_user() -> dict[str, str]:
    """Return the environment without what we have set: what a program that the user names is to run in."""
    return {name: value for name, value in os.environ.items() if name not in _ours or value != _ONE}
