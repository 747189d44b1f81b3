import pytest
from pydantic import ValidationError

from polyad.data.config import DataConfig


def test_defaults_need_nothing():
    defaults = {"kind": "text", "path": None, "mixture": None, "num_workers": 0}
    assert DataConfig().model_dump() == defaults


@pytest.mark.parametrize("values", [{"num_workers": -1}, {"num_workers": "2"}, {"pth": "x"}])
def test_bad_value_is_refused(values):
    with pytest.raises(ValidationError):
        DataConfig(**values)


def test_every_field_is_described():
    assert all(field.description for field in DataConfig.model_fields.values())


@pytest.mark.parametrize("path", ["", "~nobody-of-this-name/data"])
def test_a_path_that_cannot_be_is_refused_by_its_key(path):
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate({"mixture": [{"path": path, "weight": 1.0}]})
    assert caught.value.errors()[0]["loc"] == ("mixture", 0, "path")
