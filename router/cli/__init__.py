"""The command line, one file a command.

Its parts in C are looked for before anything else is imported: where one is missing there is no slower way that the
router would take in its place, only a start that must be refused in words.
"""

import importlib
import sys

#: Each with what it does. Linux and macOS have both; there is no other system that the router runs on.
_PARTS_IN_C = {"httptools": "reads HTTP", "uvloop": "is the event loop"}
_EXIT_UNUSABLE = 2


def _refuse_without_parts_in_c() -> None:
    for name, what in _PARTS_IN_C.items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            sys.stderr.write(
                f"router: cannot start without {name}, which {what} ({error}). The router has no other one. "
                f"Install the package again with its dependencies, or `pip install {name}`.\n"
            )
            sys.exit(_EXIT_UNUSABLE)


_refuse_without_parts_in_c()
