"""Importing this makes Megatron's parsers quick: for their help texts they read Megatron's source each time anew."""

import inspect
from functools import cache

inspect.getsource = cache(inspect.getsource)
