"""The machine: processors and memory, safetensors files, atomic writes, the terminal."""
