"""ONNX models on one device, and their stages in a pipeline."""
