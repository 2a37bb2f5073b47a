import pytest

from regard.training.families.decoder import DECODER, DecoderSettings
from regard.training.families.settings import SIZES


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    layers, width = SIZES[size]
    settings = DecoderSettings(size=size, dropout=0.3)
    config = DECODER.make_config(settings)
    assert (config.num_hidden_layers, config.hidden_size) == (layers, width)
    assert config.intermediate_size == 4 * width
    assert config.hidden_size % config.num_attention_heads == 0
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.3
    assert settings.learning_rate * width == pytest.approx(settings.rate_times_width)
    assert config.initializer_range * width**0.5 == pytest.approx(0.02 * 768**0.5)


def test_fields_of_the_configuration_go_before_the_size():
    settings = DecoderSettings(size="small", dropout=0.1, config={"hidden_size": 96, "hidden_dropout_prob": 0.0})
    config = DECODER.make_config(settings)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (96, 384, 4)
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.0, 0.1)
    # So does a rate before the width's.
    assert settings.learning_rate == pytest.approx(0.256 / 96)
    assert DecoderSettings(learning_rate=0.5).learning_rate == 0.5


@pytest.mark.parametrize(("width", "expected"), [(96, 96), (0, 128), (-5, 128), ("wide", 128), (None, 128)])
def test_a_width_that_is_none_is_left_for_the_configuration_to_refuse(width, expected):
    settings = DecoderSettings(config={"hidden_size": width})
    assert settings.width == expected
    if width != expected:
        with pytest.raises(Exception, match="hidden_size"):
            DECODER.make_config(settings)
