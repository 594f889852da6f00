"""What values next to weights of PyTorch would do in inference, by their names."""

from typing import Any

import numpy as np
import pytest

from lockstep.weights.formats.torch_settings import find_effect, list_values
from lockstep.weights.weights_choice import WeightsChoice

SCALES = "scales the logits"
SHIFTS = "shifts or selects"
NOT_SOFTMAX = "sigmoids or numbers"
NOT_RGB = "not RGB"
UNKNOWN = "may change"
NEEDED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 1.5}, SCALES),
    ({"config": {"T": 2.0}}, SCALES),
    ({"tau": np.array([0.5])}, SCALES),
    ({"optimal_temperature": 1.2}, SCALES),
    ({"best_temp": "1.5"}, SCALES),
    ({"calibration": {"temperature": {"value": 1.3}}}, SCALES),
    ({"ema_temperature": 1.2}, SCALES),
    ({"logtemp": 0.3}, SCALES),
    ({"log_temperature": np.array(0.3)}, SCALES),
    ({"logit_scale": np.array(4.6)}, SCALES),
    ({"config": {"logit_adjustment": np.zeros(5) + 0.1}}, SCALES),
    ({"postprocess": {"scale": 2.0}}, "scales what"),
    ({"conf_threshold": 0.4}, SHIFTS),
    ({"class_prior": [0.1, 0.2, 0.3, 0.2, 0.2]}, SHIFTS),
    ({"label_offset": 1}, SHIFTS),
    ({"calibrator": {"a": np.array([1.2])}}, SHIFTS),
    ({"config": {"activation": "sigmoid"}}, "activation"),
    ({"config": {"head": {"act": "nn.Sigmoid()"}}}, "activation"),
    ({"config": {"act_layer": "silu"}}, "activation"),
    ({"heads": {0: {"act": "sigmoid"}, 1: {"act": "relu"}}}, "activation"),
    ({"heads": [{"act": "sigmoid"}, {"act": "relu"}]}, "activation"),
    ({"config": {"activation": "leaky_relu"}}, "activation"),
    ({"loss": "BCEWithLogitsLoss"}, NOT_SOFTMAX),
    ({"criterion": {"_target_": "torch.nn.BCEWithLogitsLoss"}}, NOT_SOFTMAX),
    ({"config": {"losses": ["ce", "bce"]}}, NOT_SOFTMAX),
    ({"loss_fn": "binary_cross_entropy"}, NOT_SOFTMAX),
    ({"args": {"multilabel": True}}, NOT_SOFTMAX),
    ({"task": "multi-label"}, NOT_SOFTMAX),
    ({"problem_type": "multi_label_classification"}, NOT_SOFTMAX),
    ({"objective": "regression"}, NOT_SOFTMAX),
    ({"hyper_parameters": {"pos_weight": np.ones(5) / 2}}, NOT_SOFTMAX),
    ({"hparams": '{"loss": "bce"}'}, NOT_SOFTMAX),
    ({"config": {"input_format": "BGR"}}, NOT_RGB),
    ({"config": {"channel_order": "bgr"}}, NOT_RGB),
    ({"config": {"to_rgb": False}}, NOT_RGB),
    ({"config": {"bgr": True}}, NOT_RGB),
    ({"config": {"color_mode": "grayscale"}}, NOT_RGB),
    ({"config": {"in_chans": 1}}, NOT_RGB),
    ({"model": {"in_channels": 4}}, NOT_RGB),
    ({"cfg": {"MODEL": {"NUM_CLASSES": 3}}}, "3 outputs"),
    ({"config": {"global_pool": "catavgmax"}}, "pool"),
    ({"config": {"pooling": "gem"}}, "pool"),
    ({"config": {"dilation": [1, 1, 2]}}, "strides"),
    ({"config": {"bn_eps": 1e-3}}, "epsilon"),
    ({"config": {"aa_layer": "blurpool"}}, "blurs"),
    ({"config": {"normalize_features": True}}, "features"),
    ({"config": {"mean": [0.1, 0.2, 0.3]}}, "normalises"),
    ({"mean": 0.5}, "normalises"),
    ({"W": np.zeros((5, 5))}, UNKNOWN),
    ({"gate": np.zeros(7)}, UNKNOWN),
    ({"order": np.array([4, 3, 2, 1, 0])}, UNKNOWN),
    ({"per_class": [0.1, 0.2, 0.3, 0.4, 0.5]}, UNKNOWN),
]
HARMLESS: list[dict[str, Any]] = [
    {"preds": np.zeros((30, 5)), "oof": np.zeros((30, 5)), "y_true": np.zeros(30)},
    {"confusion_matrix": np.ones((5, 5)), "per_class_f1": [0.1, 0.2, 0.3, 0.4, 0.5]},
    {"auroc": 0.98, "mAP": 0.5, "best_f1": 0.7, "kappa": 0.8, "ece": 0.03, "mse": 0.2},
    {"pretrained": True, "backbone": "net", "stage": 2, "fold": 0, "patience": 5, "tta": 4},
    {"label_smoothing": 0.1, "dropout": 0.5, "mixup_alpha": 0.4, "embedding_dim": 64},
    {"created_at": "2024-01-01", "comment": "better than sigmoid", "tags": ["gray", "bce"]},
    {"cmd": "train.py --loss bce", "run_name": "bce", "task": "classification"},
    {"LightningDataModule": {"seed": 3}, "MyData": {"idx": np.array([1, 2, 3])}},
    {"class_to_idx": {"sigmoid": 0, "scale": 1, "bias": 2, "gray": 3, "t": 4}},
    {"config": {"activation": "ReLU(inplace=True)", "loss": "CrossEntropyLoss", "bias": True}},
    {"config": {"num_classes": 5, "in_chans": 3, "input_format": "RGB", "pool": "avg"}},
    {"config": {"head": {"in_channels": 2048}, "input_type": "labelled", "cmap": "gray"}},
    {"config": {"kd_temperature": 4.0, "scale": [0.08, 1.0], "grayscale": 0.2, "betas": [0.9]}},
    {"config": {"temperature": 1.0, "dilation": [False, False], "normalize": True}},
    {"scheduler": {"T_max": 10, "threshold": 1e-4}, "MixedPrecision": {"scale": 65536.0}},
    {"optimizer": {"state": {0: {"exp_avg": np.zeros((5, 64))}}}, "amp": {"scale": 2.0}},
    {"cv": {"mean": 0.9, "std": 0.01}, "train_losses": [0.5, 0.4, 0.3]},
    {"hyper_parameters": {"class_weights": np.ones(5), "milestones": [30, 60, 80]}},
]


def list_effects(values: dict[str, Any], *ignore: str) -> list[str]:
    choice = WeightsChoice(ignore=ignore)
    leaves, _ = list_values(values, (), choice)
    return list(filter(None, (find_effect(name, value, 5) for name, value in leaves.items())))


@pytest.mark.parametrize(("values", "effect"), NEEDED, ids=str)
def test_a_value_that_may_matter_has_an_effect(values: dict[str, Any], effect: str) -> None:
    effects = list_effects(values)
    assert effects
    assert effect in effects[0]


@pytest.mark.parametrize("values", HARMLESS, ids=str)
def test_results_texts_and_settings_of_a_training_have_none(values: dict[str, Any]) -> None:
    assert list_effects(values) == []


def test_a_value_is_left_out_by_its_path() -> None:
    values = {"config": {"model": {"act": "gelu"}, "lr": 0.1}, "act": "relu"}
    assert list_effects(values)
    assert list_effects(values, "config.model.*") == []
    _, parts = list_values(values, ("act",), WeightsChoice(ignore=("config.*",)))
    assert [part.name for part in parts] == ["config.model.act", "config.lr"]
