"""dsv4: DeepSeek-V4 (Pro and Flash) as layers over one set of operations. See docs/design.md for where each thing lives."""

__version__ = "0.1.0"
