"""Text and tokenizers: from files to documents, from documents to byte-level BPE. Needs neither torch nor Megatron."""
