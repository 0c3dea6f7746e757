"""Recording the steps of a program: timeline and execution trace of the same steps, and what the profiler costs."""

from stepscope.traces.recording.api import Record, ignoring_marks, record, step
from stepscope.traces.recording.evidence import (
    Overhead,
    ProfilerSettings,
    RankRecording,
    Recording,
    RecordSettings,
    is_recording,
    make_settings,
    read_recording,
)
from stepscope.traces.recording.recorder import Recorder, RecordingFailedError

__all__ = [
    "Overhead",
    "ProfilerSettings",
    "RankRecording",
    "Record",
    "RecordSettings",
    "Recorder",
    "Recording",
    "RecordingFailedError",
    "ignoring_marks",
    "is_recording",
    "make_settings",
    "read_recording",
    "record",
    "step",
]
