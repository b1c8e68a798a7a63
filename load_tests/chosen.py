"""Which version of the model is looked at: the one in a folder that is named, or else the one that is served.

The number of a version stands in no script: the store says which is the newest. Knows nothing of what is
done with it.
"""

from pathlib import Path

from service.settings import Settings
from service.store import Version, open_version

ROOT = Path(__file__).parent.parent


def chosen_version(folder: Path | None = None) -> Version:
    """The verified version.

    Args:
        folder: `<store>/<name>/<number>`; None for the one that a service without settings takes from the
            store of the repository.

    Raises:
        StartupError: it is not there, or it is damaged.
    """
    if folder is None:
        settings = Settings.model_construct()
        return open_version(ROOT / settings.model_store, settings.model, settings.version)
    whole = folder.resolve()
    number = int(whole.name) if whole.name.isdecimal() else 0  # 0 is never there, and the error says so
    return open_version(whole.parents[1], whole.parent.name, number)
