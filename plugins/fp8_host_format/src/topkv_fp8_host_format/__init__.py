"""The host format ``fp8`` of topkv: keys and values as a byte an element in host memory."""
