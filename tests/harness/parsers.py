"""Importing this module makes Megatron's parsers fast: without it, they read Megatron's source for every help text."""

import inspect
from functools import cache

inspect.getsource = cache(inspect.getsource)
