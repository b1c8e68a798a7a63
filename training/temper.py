"""Fits the temperature of a version that is not in the store yet, on dev rows, by its own float32 file.

Knows nothing of how the files were made or of the other bounds of a version.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from service.classifier import activate
from service.store import Metric, Version
from training.calibrate import calibration_error, chances_of, fit_temperature, reliability
from training.classifiers import VersionClassifier
from training.data import Example

ERROR = "expected calibration error"
ERROR_BEFORE = f"{ERROR} at temperature 1"


def temper(
    version: Version, sets: Mapping[str, Sequence[Example]], *, threads: int, command: str
) -> tuple[float, list[Metric]]:
    """The temperature at which the log loss of all rows is least, and the calibration error before and after.

    One temperature serves every form of the version. Raises DataError where none can be fitted, ConfigError
    for a text that the service would refuse.
    """
    manifest = version.manifest
    file = next(model for model in manifest.models if model.precision == "float32")
    reader = VersionClassifier(version.path, threads=threads, engine=file.format, precision=file.precision)
    logits = {
        name: reader.logits([example.text for example in rows], progress=f"{name}, for the temperature")
        for name, rows in sets.items()
    }
    reader.engine.close()
    labels = {name: [example.label for example in rows] for name, rows in sets.items()}
    temperature = fit_temperature(
        np.concatenate(list(logits.values())),
        [label for name in sets for label in labels[name]],
        manifest.activation,
    )
    metrics = []
    for name in sets:
        for what, value in ((ERROR_BEFORE, 1.0), (ERROR, temperature)):
            chances = chances_of(activate(logits[name], manifest.activation, temperature=value))
            error = calibration_error(reliability(chances, labels[name]))
            metrics.append(
                Metric(what, name, file.precision, error, len(labels[name]), command, format=file.format)
            )
    return temperature, metrics
