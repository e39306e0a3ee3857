"""What a checkpoint's tensors are, and NVFP4 checkpoints that other engines load.

    manifest.py     module -> formats, kernel, scale conventions; from the files of a training run (no torch)
    folders.py      the train folder and the output folder that an export is given (no torch)
    checkpoint.py   Hugging Face safetensors read tensor by tensor, written in shards
    plan.py         which matrices are quantized, which share a global scale, which input they multiply
    activations.py  static activation scales, which both formats require for W4A4
    formats.py      compressed-tensors and ModelOpt: tensor names, forms of the global scales, config.json
    write.py        the export
    verify.py       the verifier, which reads the files and trusts nothing the writer said
    parity.py       log-probs of the export against the trainer's surgery and the engine's own quantization

Importing this package loads no torch.
"""
