"""Pre-flight of an experiment's start checkpoint: which rollout precision would hurt, before any RL.

snakemake preflight_toy        on the evaluation prompts of configs/toy.yaml (any experiment: preflight_NAME)

Responses are sampled from the checkpoint. Report: results/<experiment>/preflight-<model hash>/preflight.md.
"""

for name in EXPERIMENTS:

    rule:
        name:
            f"preflight_{name}"
        input:
            paths.preflight_dir(EXPERIMENTS[name]) / "preflight.json",


rule preflight:
    input:
        model=model_manifest,
        # The checkpoint already depends on the data's content; here the files only have to be there.
        data=ancient(data_manifest),
    output:
        markdown="results/{experiment}/preflight-{preflight}/preflight.md",
        svg="results/{experiment}/preflight-{preflight}/preflight.svg",
        png="results/{experiment}/preflight-{preflight}/preflight.png",
        done="results/{experiment}/preflight-{preflight}/preflight.json",
    log:
        "results/logs/{experiment}/preflight-{preflight}.log",
    benchmark:
        "results/benchmarks/{experiment}/preflight-{preflight}.tsv"
    wildcard_constraints:
        preflight="[0-9a-f]{10}",
    threads: threads_of
    resources:
        mem_mb=memory_mb,
        job_gib=memory_gib,
        cpus_per_task=threads_of,
        gpu=engine_gpus,
        runtime=120,
        slurm_partition=partition,
        slurm_account=account,
    params:
        code=code_hash("quads.preflight", "quads.diagnostics.preflight"),
        model=lambda wildcards, input: Path(input.model).parent,
        prompts=lambda wildcards, input: Path(input.data).parent / "eval.parquet",
        tokens=lambda wildcards: experiment_of(wildcards).grpo.max_response_tokens,
        device=lambda wildcards: experiment_of(wildcards).runtime.device,
        out=folder,
    shell:
        "python -m quads.preflight {params.model} --prompts {params.prompts} --generate {params.tokens} "
        "--device {params.device} --out {params.out} 2>&1 | tee -a {log}"
