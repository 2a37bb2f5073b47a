"""What is asked of transformers when something is loaded that others may have made."""

import pytest

from regard.modeling.loading.load import load_model, load_part


class Recorder:
    """Stands for an Auto class."""

    def __init__(self) -> None:
        self.options: dict = {}

    def from_pretrained(self, path, **options):
        self.options = options
        raise OSError("there is nothing")


@pytest.mark.parametrize("load", [load_model, load_part])
def test_no_code_is_run_and_nobody_asked_whether_to(load):
    # Where nothing is said, transformers asks at a terminal.
    recorder = Recorder()
    with pytest.raises(OSError, match="there is nothing"):
        load(recorder, "folder", "`model` (folder)", dtype="auto")
    assert recorder.options["trust_remote_code"] is False
    assert recorder.options["dtype"] == "auto"
    if load is load_model:
        assert recorder.options["use_safetensors"] is True
