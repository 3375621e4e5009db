"""What every test shares. Tests here import no ML framework; those that do live in tests/engine."""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
