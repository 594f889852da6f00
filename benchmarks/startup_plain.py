"""The plain programs of `startup.py`, as people write them with PyTorch, Pillow and ONNX Runtime.

    python startup_plain.py predict-torch|predict-onnx|serve|load|train ARGUMENTS...

torchvision must be importable for `load` and `train`.
"""

import sys


def predict_onnx(model: str, photo: str) -> None:
    import numpy as np
    import onnxruntime
    from PIL import Image

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    pixels = np.asarray(Image.open(photo).convert("RGB"))[None]
    classes, probabilities = session.run(["classes", "probabilities"], {"images": pixels})
    print(classes[0], probabilities[0, classes[0]])


def build(weights: str = "") -> object:
    import torch
    from torchvision.models import resnet50

    model = resnet50(num_classes=3)
    if weights:
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model


def read(photo: str) -> object:
    from PIL import Image
    from torchvision.transforms import v2

    steps = [v2.Resize(256), v2.CenterCrop(224), v2.PILToTensor()]
    pixels = v2.Compose(steps)(Image.open(photo).convert("RGB"))
    return pixels[None].float().div(255)


def load(weights: str) -> None:
    build(weights)


def predict_torch(weights: str, photo: str) -> None:
    import torch

    with torch.inference_mode():
        print(build(weights).eval()(read(photo)).softmax(1))


def serve(model: str, port: str) -> None:
    import io
    import json
    from http.server import BaseHTTPRequestHandler, HTTPServer

    import numpy as np
    import onnxruntime
    from PIL import Image

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            pixels = np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))[None]
            [probabilities] = session.run(["probabilities"], {"images": pixels})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(probabilities[0].tolist(), allow_nan=False).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


def train(data: str, out: str) -> None:
    import torch
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    images = ImageFolder(
        f"{data}/train", v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True)])
    )
    loader = DataLoader(images, 8, shuffle=True, num_workers=2)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    pixels, labels = next(iter(loader))
    torch.nn.functional.cross_entropy(model(pixels), labels).backward()
    optimizer.step()
    torch.save(model.state_dict(), out)


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")](*sys.argv[2:])
