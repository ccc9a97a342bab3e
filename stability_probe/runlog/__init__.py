"""The run directory: written while the model trains, read while it does and after.

    writer = RunWriter("runs/exp1", header); writer.emit(record); writer.close()
    run = load("runs/exp1"); run.alerts; run.frame(); run.records()

`schema.py` describes what lies in it.
"""

from stability_probe.runlog.read import Run, load
from stability_probe.runlog.schema import SCHEMA_VERSION
from stability_probe.runlog.write import RunWriter

__all__ = ["SCHEMA_VERSION", "Run", "RunWriter", "load"]
