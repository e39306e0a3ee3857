"""Rollout throughput of every arm's engine mode on the start checkpoint, all in one run.

snakemake bench_toy    with the shapes of configs/toy.yaml (any experiment: bench_NAME)

Backend and CUDA graphs are the experiment's (runtime.rollout_backend, rollout_graphs), as in its training; every row
says which served it. Others: run the stage by hand with --backend and --graphs or --no-graphs, into a file of its own.

Give it the machine to itself. The report takes in every results/<experiment>/throughput/*.json, so files measured on
other machines are put there under other names: rollout.json is made again when the benchmark's code changes.
"""

for name in EXPERIMENTS:

    rule:
        name:
            f"bench_{name}"
        input:
            paths.throughput_dir(EXPERIMENTS[name]) / "rollout.json",


rule bench_rollout:
    input:
        # Only times are measured: other weights of the same shape give the same ones.
        model=ancient(model_manifest),
    output:
        table="results/{experiment}/throughput/rollout.md",
        details="results/{experiment}/throughput/rollout.details.jsonl",
        done="results/{experiment}/throughput/rollout.json",
    log:
        "results/logs/{experiment}/throughput/rollout.log",
    benchmark:
        "results/benchmarks/{experiment}/throughput/rollout.tsv"
    threads: threads_of
    resources:
        mem_mb=memory_mb,
        job_gib=memory_gib,
        cpus_per_task=threads_of,
        gpu=engine_gpus,
        runtime=240,
        slurm_partition=partition,
        slurm_account=account,
    params:
        code=code_hash("quads.bench.rollout", "quads.integrations.vllm"),
        # The stage reads them from the experiment; here they are a reason to measure again.
        backend=lambda wildcards: experiment_of(wildcards).runtime.rollout_backend,
        graphs=lambda wildcards: experiment_of(wildcards).runtime.rollout_graphs,
        model=lambda wildcards, input: Path(input.model).parent,
        experiment=config_file,
    shell:
        "python -m quads.bench.rollout --experiment {params.experiment} --model {params.model} --out {output.done} "
        "2>&1 | tee -a {log}"
