"""The only packages that import Megatron. All use `patches.py`, which checks and applies replacements in Megatron;
`patch_table.py` says when.
"""
