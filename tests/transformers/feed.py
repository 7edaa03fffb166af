"""Inputs for any model of transformers, by the names of the arguments of its forward."""

import inspect

import torch

BATCH = 2


def _find(configuration, *names, default):
    """Return the first field of one of these names, in the configuration or in a part of it."""
    queue = [configuration]
    while queue:
        part = queue.pop(0)
        for name in names:
            value = part.__dict__.get(name)
            if value is not None and not isinstance(value, bool):
                return value
        queue += [x for x in part.__dict__.values() if hasattr(x, "sub_configs")]
    return default


def _tokens(configuration, length, seed):
    vocabulary = min(int(_find(configuration, "vocab_size", default=99)), 99)
    generator = torch.Generator().manual_seed(seed)
    first, last = (9, 56) if vocabulary > 60 else (0, vocabulary)
    return torch.randint(first, last, (BATCH, length), generator=generator)


def _noise(*sizes, seed=5):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def _image_size(configuration):
    size = _find(configuration, "image_size", "resolution", "input_size", default=64)
    sizes = list(size.values()) if isinstance(size, dict) else size
    sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes, sizes]
    return [int(x) for x in sizes[-2:]] if len(sizes) > 1 else [int(sizes[0])] * 2


def _images(configuration, frames=None):
    channels = int(_find(configuration, "num_channels", "in_channels", "in_chans", default=3))
    middle = () if frames is None else (frames,)
    return _noise(BATCH, *middle, channels, *_image_size(configuration))


def _sounds(configuration, frames, last):
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim")
    bins = int(_find(configuration, *names, default=80))
    return _noise(BATCH, frames, bins) if last else _noise(BATCH, bins, frames)


def _other_than_text(configuration):
    """Return what to try for images, spectra and waves, by the name of the argument."""
    frames = int(_find(configuration, "num_frames", default=4))
    positions = int(_find(configuration, "max_source_positions", default=32))
    longest = int(_find(configuration, "max_length", default=64))
    return {
        "pixel_values": [_images(configuration), _images(configuration, frames)],
        "input_features": [
            _sounds(configuration, count, last)
            for count in (2 * positions, 64, 256)
            for last in (False, True)
        ],
        "input_values": [
            _noise(BATCH, 800),
            _noise(BATCH, 4000),
            _noise(BATCH, 1, 800),
            _sounds(configuration, longest, True),
        ],
        "pixel_values_videos": [_images(configuration, frames)],
    }


def ways(model, length, padding):
    """Yield inputs to try, the likeliest first; a model takes the first that eager runs on.

    Args:
        model: the model.
        length: of its texts.
        padding: "none", "left" or "right".
    """
    wanted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    main = main[0] if isinstance(main, list) else main
    text = _text(model, wanted, length, padding)
    yield from _patches(model.config, wanted, text)
    others = _other_than_text(model.config)
    if main not in others:
        yield text
        yield _ended(text)
    for value in others.get(main, ()):
        yield {main: value}
        yield {**text, main: value}
    for name, values in others.items():
        if name != main and name in wanted:
            for value in values:
                yield {**text, name: value}
    yield from _series(model.config, wanted)


def _text(model, wanted, length, padding):
    text, configuration = {}, model.config
    mask = torch.ones(BATCH, length, dtype=torch.long)
    if padding == "left":
        mask[0, :3] = 0
    elif padding == "right":
        mask[0, -3:] = 0
    for name in ("input_ids", "inputs", "input_tokens"):
        if name in wanted:
            text[name] = _tokens(configuration, length, 1)
            break
    if padding != "none" and "attention_mask" in wanted:
        text["attention_mask"] = mask
    if "decoder_input_ids" in wanted:
        text["decoder_input_ids"] = _tokens(configuration, length - 2, 2)
    if "bbox" in wanted:
        generator = torch.Generator().manual_seed(3)
        boxes = torch.randint(0, 400, (BATCH, length, 4), generator=generator)
        text["bbox"] = torch.cat([boxes[..., :2], boxes[..., :2] + boxes[..., 2:]], -1)
        if type(model).__name__.startswith("Bros"):
            text["bbox"] = text["bbox"].float() / 1000
    if "visual_feats" in wanted:
        text["visual_feats"] = _noise(
            BATCH, 5, int(_find(configuration, "visual_feat_dim", default=8))
        )
        text["visual_pos"] = _noise(BATCH, 5, 4).abs()
    if type(model).__name__.endswith("ForMultipleChoice"):
        text = {name: x[:, None].repeat_interleave(2, 1) for name, x in text.items()}
    return text


def _ended(text):
    """Return the text with its end marked, for heads that read there, and for the decoder too."""
    ended = {name: x for name, x in text.items() if name != "decoder_input_ids"}
    for name, x in ended.items():
        if name.endswith("input_ids"):
            ended[name] = torch.cat([x[:, :-1], torch.full_like(x[:, :1], 2)], 1)
    return ended


def _patches(configuration, wanted, text):
    """Images cut into patches, of 4 x 4 and 2 x 6 of them, one after the other."""
    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in wanted), None)
    main = next((name for name in ("hidden_states", "pixel_values") if name in wanted), None)
    cut = grid is not None and main is not None and "input_ids" not in wanted
    if not cut and "spatial_shapes" not in wanted:
        return
    size = int(_find(configuration, "patch_size", default=14))
    channels = int(_find(configuration, "in_channels", "num_channels", "in_chans", default=3))
    if cut:
        times = int(_find(configuration, "temporal_patch_size", default=1))
        sizes = torch.tensor([[1, 4, 4], [1, 2, 6]])
        yield {main: _noise(28, channels * times * size * size), grid: sizes}
        yield {main: _noise(28, channels, size, size), grid: sizes}
        yield {main: _noise(28, channels, times, size, size), grid: sizes}
    else:
        images = {
            "pixel_values": _noise(BATCH, 16, channels * size * size),
            "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
        }
        images = {name: x for name, x in images.items() if name in wanted}
        yield images
        yield {**text, **images}


def _series(configuration, wanted):
    """Inputs of models of time series."""
    if "past_values" not in wanted:
        return
    context = int(_find(configuration, "context_length", "context_len", default=32))
    lags = _find(configuration, "lags_sequence", default=[0])
    past = context + max(lags)
    future = int(_find(configuration, "prediction_length", "horizon_length", default=4) or 4)
    features = int(_find(configuration, "num_time_features", default=0))
    channels = int(_find(configuration, "num_input_channels", default=1))
    yield {"past_values": _noise(BATCH, context, channels)}
    series = {"past_values": _noise(BATCH, past), "past_observed_mask": torch.ones(BATCH, past)}
    series["past_time_features"] = _noise(BATCH, past, features)
    if "future_values" in wanted:
        series["future_values"] = _noise(BATCH, future)
        series["future_time_features"] = _noise(BATCH, future, features)
    yield {name: x for name, x in series.items() if name in wanted}
    yield {"past_values": _noise(BATCH, context)}
