"""Reads arguments and configuration files, refuses unsupported options, and warns about options without effect."""

import tomllib
from pathlib import Path
from typing import Any

ROLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("roles.toml").read_text())
"""Megatron's arguments by what we do with them."""
