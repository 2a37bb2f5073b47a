"""A process for the real clients of the Hub: they read where it is, and whether they may use it, when imported."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def _set_environment(environment):
    os.environ.clear()
    os.environ.update(environment)


def error_of(function, *args, **kwargs):
    """The type and the text of what a function raises, on the client's side; None if it raises nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


class Client:
    """A process that calls functions of test modules. A context manager.

    Args:
        environment: of the process, see `HubServer.environment`.
    """

    def __init__(self, environment):
        # Under the environment before it imports anything: the functions are sent by name.
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), _set_environment, (environment,))

    def __call__(self, function, *args, **kwargs):
        return self.pool.submit(function, *args, **kwargs).result(timeout=300)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.pool.shutdown(cancel_futures=True)
