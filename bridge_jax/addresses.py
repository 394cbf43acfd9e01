"""Addresses of servers, as a user gives them."""

from __future__ import annotations

from urllib.parse import urlsplit

from bridge_jax.errors import UserError


def checked_address(url: str, what: str, example: str) -> str:
    """`url` without a slash at its end.

    Raises:
      UserError: no http address; one with a name and a password in it, which logs and results would repeat (the message does not).
    """
    try:
        parts = urlsplit(url)
        named = parts.username is not None or parts.password is not None
    except ValueError:
        raise UserError(f"{what} {url!r}: is no address; give one such as {example}") from None
    if named:
        raise UserError(f"{what}: leave name and password out of the address, which is written to logs and results")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"{what} {url!r}: give its address such as {example}; it must begin with http:// or https://")
    return url.rstrip("/")
