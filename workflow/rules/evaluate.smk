"""Accuracy of a trained run, in the arm's own engine and in a BF16 engine.

`samples` is a param and never an output: the generation cache outlives a failed job and a changed evaluation setting.
"""


rule evaluate:
    input:
        train="results/{experiment}/train/{run}/result.json",
        # The training result already depends on the data's content; here the files only have to be there.
        data=ancient(data_manifest),
        benchmarks=benchmark_manifests,
    output:
        "results/{experiment}/eval/{run}-{eval_hash}/result.json",
    log:
        "results/logs/{experiment}/eval/{run}-{eval_hash}.log",
    benchmark:
        "results/benchmarks/{experiment}/eval/{run}-{eval_hash}.tsv"
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
        code=code_hash("quads.evaluate", "quads.integrations.vllm", "quads.rollout"),
        experiment=config_file,
        arm=lambda wildcards, output: run_of(wildcards).arm.name,
        seed=lambda wildcards, output: run_of(wildcards).seed,
        data=lambda wildcards, input: Path(input.data).parent,
        benchmarks=lambda wildcards, input: (
            Path(input.benchmarks[0]).parent
            if isinstance(input.benchmarks, list)
            else Path(input.benchmarks).parent
        ),
        train=lambda wildcards, input: Path(input.train).parent,
        samples=lambda wildcards, output: paths.samples_dir(
            experiment_of(wildcards), run_of(wildcards)
        ),
        out=folder,
    shell:
        "python -m quads.evaluate --experiment {params.experiment} --arm {params.arm} --seed {params.seed} "
        "--data {params.data} --benchmarks {params.benchmarks} --train {params.train} --cache {params.samples} "
        "--out {params.out} 2>&1 | tee -a {log}"
