"""What hardware can do, which turns counted operations and bytes into seconds.

`gpus` reads a catalogue of GPUs, with their links and their memory, from `gpus.toml`. `constants` holds the few numbers
that were fitted to measured runs, and how far predictions were from published ones.
"""
