import numpy as np

COMPILE = "off"
COMPILES_QUICKLY = True
BORROWS = False
LOGITS = np.float64
ANY_SIZE = True
REASON = "Unable to allocate"
STEP = "_gradients"
BATCH = "16 images"


def find_obstacle(precision: str) -> str | None:
    return None


def images(normalised: np.ndarray) -> np.ndarray:
    return normalised.transpose(0, 3, 1, 2)


def array(logits: np.ndarray) -> np.ndarray:
    return logits


def exhaust_host(*_: object) -> np.ndarray:
    return np.empty(2**50)
