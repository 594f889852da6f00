import numpy as np

FRAMEWORK = None
LOGITS = np.float64
ANY_SIZE = True
ADVICE = ""
REASON = "Unable to allocate"
STEP = "_gradients"
BATCH = "16 images"


def images(normalised: np.ndarray) -> np.ndarray:
    return normalised.transpose(0, 3, 1, 2)


def array(logits: np.ndarray) -> np.ndarray:
    return logits


def exhausted(*_: object) -> np.ndarray:
    return np.empty(2**50)
