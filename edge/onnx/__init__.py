"""An ONNX model on one device, and its stages in a pipeline."""
