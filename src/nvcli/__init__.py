"""nvcli: offline LLM generation on one machine, from JSONL to JSONL."""

__version__ = "0.1.0"
