"""Settings every test shares: nothing reaches a hub or sends usage figures, and small machines are not oversubscribed."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Triton decides at import whether its kernels compile or run in its interpreter: without an NVIDIA device they can only be interpreted.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
