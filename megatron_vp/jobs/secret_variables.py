"""Keeps passwords and keys out of a run's arguments, which are written to files and logs that others may read."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

# Most of these words match only at the end of a name, and PWD only after a prefix such as DB_. TOKENIZER, TRAIN_TOKENS,
# KEY_FILE and PWD therefore do not count as secrets.
_NAMES = re.compile(
    r"(?!.*_(FILE|PATH|DIR)$).*"
    r"((KEYS?|TOKEN|PASS|PASSPHRASE|CREDENTIALS?|CREDS?|COOKIE|JWT)\d*$|(^|_)(AUTH|BEARER|PAT)\d*$|.._PWD$|SECRET|PASSW)",
    re.IGNORECASE,
)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]+@")


@contextmanager
def environment_without_secrets() -> Iterator[list[str]]:
    """Make OmegaConf's `oc.env` refuse variables whose name or value looks like a secret.

    Yields a list to which the reason for each refusal is appended, because OmegaConf replaces the error with its own.
    """
    refused: list[str] = []

    def environment(name: str, *default: Any) -> Any:
        if _NAMES.match(name):
            refused.append(
                f"${{oc.env:{name}}} looks like a secret, and arguments are written to files and logs: leave it out; "
                f"programs that need {name} can read it from the environment"
            )
            raise ValueError(refused[0])
        value = oc.env(name, *default)
        if isinstance(value, str) and _URL_WITH_PASSWORD.search(value):
            refused.append(
                f"${{oc.env:{name}}} has a password in its URL, and arguments are written to files and logs: leave it "
                "out"
            )
            raise ValueError(refused[0])
        return value

    _resolve_environment_by(environment)
    try:
        yield refused
    finally:
        _resolve_environment_by(oc.env)


def _resolve_environment_by(function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        # OmegaConf 2.4 warns that this function has a new name, but in 2.3 another function has that name.
        warnings.simplefilter("ignore")
        OmegaConf.register_new_resolver("oc.env", function, replace=True)
