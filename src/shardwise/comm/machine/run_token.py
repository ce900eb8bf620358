"""The run's token: a secret that all processes of a run have, and no other.

`shardwise launch` makes it. What the ranks write to torch's store lies under a name that is derived
from it, so processes with another token share no entry; their fingerprints are all that they see
of each other.
"""

from __future__ import annotations

import hmac
import os

RUN_TOKEN = "SHARDWISE_RUN_TOKEN"  # noqa: S105 - the name of the variable


def run_token() -> str:
    """This process's token; ``""`` if it has none."""
    return os.environ.get(RUN_TOKEN, "")


def derived(token: str, purpose: str) -> str:
    """A text that only who knows the token can form; ``"none"`` without a token."""
    return hmac.digest(token.encode(), purpose.encode(), "sha256").hex()[:32] if token else "none"
