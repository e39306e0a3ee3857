"""GRPO, one job per arm and seed.

The job resumes from `checkpoints`, which is a param: Snakemake deletes the outputs of a failed job. The declared output
is the last file that the stage writes; history, receipt and log lie beside it.
"""


rule train:
    input:
        data=data_manifest,
        model=model_manifest,
    output:
        "results/{experiment}/train/{run}/result.json",
    log:
        "results/logs/{experiment}/train/{run}.log",
    benchmark:
        "results/benchmarks/{experiment}/train/{run}.tsv"
    threads: threads_of
    resources:
        mem_mb=memory_mb,
        job_gib=memory_gib,
        cpus_per_task=threads_of,
        gpu=gpus,
        runtime=1440,
    params:
        code=code_hash(*TRAINING),
        config=lambda wildcards: config_hash(run_of(wildcards)),
        experiment=config_file,
        arm=lambda wildcards, output: run_of(wildcards).arm.name,
        seed=lambda wildcards, output: run_of(wildcards).seed,
        data=lambda wildcards, input: Path(input.data).parent,
        model=lambda wildcards, input: Path(input.model).parent,
        checkpoints=lambda wildcards, output: paths.checkpoint_dir(
            experiment_of(wildcards), run_of(wildcards)
        ),
        out=folder,
    shell:
        "python -m quads.train --experiment {params.experiment} --arm {params.arm} --seed {params.seed} "
        "--data {params.data} --model {params.model} --checkpoints {params.checkpoints} --out {params.out} "
        "2>&1 | tee -a {log}"
