"""Which layers and experts `--layers` and `--experts` mean."""

import pytest

from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer, check_experts, choose_layers, columns_of

LAYERS = [RoutedLayer(name=f"blocks.{n}.feed_forward", levels=(3, 2)) for n in (1, 3, 5, 7, 9)]


def blocks(*names):
    return [layer.block for layer in choose_layers(LAYERS, names)]


def test_layers_are_named_or_all_or_three():
    assert blocks() == [1, 5, 9]
    assert blocks("all") == [1, 3, 5, 7, 9]
    assert blocks("7", "3") == [3, 7]
    with pytest.raises(ConfigError, match=r"--layers: 2 is not allowed: .* are 1, 3, 5, 7, 9$"):
        blocks("1", "2")
    with pytest.raises(ConfigError, match="no block of this run has experts"):
        choose_layers([], ["all"])


def test_experts_are_columns_of_all_levels():
    assert columns_of(LAYERS[0], []) == [0, 1, 2, 3, 4]
    assert columns_of(LAYERS[0], ["1.0", "0.2"]) == [2, 3]
    check_experts(LAYERS, ["0.2", "1.1"])
    with pytest.raises(ConfigError, match=r"--experts: 1.2 is not allowed: block 1 has 0.0 to 1.1"):
        check_experts(LAYERS, ["0.2", "1.2"])


def test_a_model_whose_experts_are_whole_networks_has_no_blocks_of_them():
    mixture = [RoutedLayer(name="mixture", levels=(5,))]
    assert choose_layers(mixture, ["all"]) == mixture
    with pytest.raises(ConfigError, match="--layers: 0 is not allowed: no block of this run has"):
        choose_layers(mixture, ["0"])
    with pytest.raises(ConfigError, match=r"--experts: 9 is not allowed: mixture has 0 to 4"):
        check_experts(mixture, ["9"])
