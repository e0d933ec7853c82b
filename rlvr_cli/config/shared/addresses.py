"""The address and the key of an endpoint, checked before anything is stored or sent: an address may hold no secret.

Enters: --base-url and --api-key-env. Leaves: the key, or an RlvrError that shows neither: a key may be typed in the wrong
place.
"""

import ipaddress
import os
import re
from urllib.parse import urlsplit

from rlvr_cli.errors import RlvrError
from rlvr_cli.text import redacted

KEY_ENV = "OPENAI_API_KEY"  # the default of --api-key-env
PLACEHOLDER_KEY = "EMPTY"  # sent to an endpoint on this machine if the variable is not set
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_USUAL_NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")  # of a variable; most keys have lower-case letters
_WHERE_KEYS_BELONG = "Put the key into an environment variable, and name that with --api-key-env."


def check_address(base_url: str, *, option: str = "--base-url") -> None:
    """Raise RlvrError if it is not an address, or holds a user name, a password, parameters or what looks like a key."""
    example = "http://localhost:8000" + ("/v1" if option in ("--base-url", "--judge-url") else "")
    problem = RlvrError(f"{option} is not the address of an endpoint.", f"Give one such as {example}")
    if not (base_url.isascii() and base_url.isprintable() and " " not in base_url):
        raise problem
    try:
        parts = urlsplit(base_url)
        reachable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # such as a port above 65535
        raise problem from None
    if not reachable:
        raise problem
    if "@" in parts.netloc:
        raise RlvrError(
            f"The address of the endpoint at {parts.hostname} holds a user name or password.", _WHERE_KEYS_BELONG
        )
    if "?" in base_url or "#" in base_url:
        raise RlvrError(f"The address of the endpoint at {parts.hostname} has parameters.", _WHERE_KEYS_BELONG)
    if redacted(base_url) != base_url:
        raise RlvrError(f"The address of the endpoint at {parts.hostname} holds a key.", _WHERE_KEYS_BELONG)


def check_key_name(name: str, *, option: str = "--api-key-env") -> None:
    """Raise RlvrError if it cannot be the name of a variable, or names none that is set and may be the key itself."""
    if _NAME.fullmatch(name) is None or not (name in os.environ or _USUAL_NAME.fullmatch(name)):
        raise RlvrError(
            f"{option} is not the name of an environment variable that is set.",
            "It takes the name of the variable that holds the key, such as OPENAI_API_KEY; never the key itself.",
        )


def endpoint_key(base_url: str, api_key_env: str, *, option: str = "--api-key-env") -> str:
    """Return the key for an endpoint; `PLACEHOLDER_KEY` for one on this machine if the variable is not set.

    Raises:
        RlvrError: the variable is not set, or its value cannot be a key.
    """
    check_key_name(api_key_env, option=option)
    key = os.environ.get(api_key_env, "").strip()
    if not key and _is_local(base_url):
        return PLACEHOLDER_KEY
    if not key:
        raise RlvrError(
            f"The environment variable {api_key_env} is not set.",
            f"Put the endpoint's key there, or name another variable: {option} NAME. For an endpoint that "
            f"needs no key: export {api_key_env}={PLACEHOLDER_KEY}",
        )
    if not (key.isascii() and key.isprintable()):
        raise RlvrError(f"The key in {api_key_env} has characters that no key can have.", "Set it again.")
    return key


def _is_local(base_url: str) -> bool:
    host = urlsplit(base_url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
