"""Work beside the main thread: imports and compiles overlap with each other and with reading."""

import threading
from collections.abc import Callable
from typing import Any


def in_background(make: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `make` in a thread; the function returned waits for its result (imports and compiles overlap this way)."""
    box: dict[str, Any] = {}

    def work():
        try:
            box["result"] = make()
        except BaseException as error:  # noqa: BLE001 - handed to the one who waits
            box["error"] = error

    thread = threading.Thread(target=work)        # no daemon: a process that ends inside a compile crashes
    thread.start()

    def wait():
        thread.join()
        if "error" in box:
            raise box["error"]
        return box["result"]
    return wait
