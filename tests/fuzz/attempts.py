"""Calling what may refuse, but may not crash."""


def attempt(refusals, function, *args, **kwargs):
    """What a function gives, and the message of its refusal: one of them is None. Any other error goes through."""
    try:
        return function(*args, **kwargs), None
    except refusals as error:
        message = str(error)
    assert message.strip()
    return None, message


def attempt_in_a_line(refusals, function, *args, **kwargs):
    """The same, where the refusal is to be one line."""
    value, message = attempt(refusals, function, *args, **kwargs)
    assert message is None or "\n" not in message
    return value, message
