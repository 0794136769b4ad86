"""The oracle: the whole of DeepSeek-V4 in plain fp32 PyTorch. Imports nothing of `dsv4`; see README.md."""
