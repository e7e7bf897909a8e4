"""All modules of megatron_vp that import Megatron. `patches.py` applies our patches; `patch_table.py` lists them."""
