"""Where a run's numbers go: metrics.jsonl, the console, TensorBoard, Weights & Biases; and profiler traces."""

from jaxlm.logs.metrics_file import MetricsFile, drop_rows_after, read_rows
from jaxlm.logs.profile import ProfileWindow
from jaxlm.logs.recorder import Recorder

__all__ = ["MetricsFile", "ProfileWindow", "Recorder", "drop_rows_after", "read_rows"]
