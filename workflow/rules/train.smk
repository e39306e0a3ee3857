"""GRPO, one job per arm and seed.

The job resumes from `checkpoints`, which is a param: Snakemake deletes the outputs of a failed job. The declared output
is the last file that the stage writes; history, receipt and log lie beside it.

Two rules: an experiment on several nodes is started through quads.cluster, which spans a Ray cluster over the
allocation. TRAP: `mpi` keeps Snakemake's job step from wrapping the shell in `srun -n1`, and the Slurm plugin then wants
more than one task a node, of which the launcher uses one. GPUs are asked for per node there (gres), not in total.
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
    wildcard_constraints:
        run=run_pattern(several=False),
    threads: threads_of
    resources:
        mem_mb=memory_mb,
        job_gib=memory_gib,
        cpus_per_task=threads_of,
        gpu=gpus,
        runtime=1440,
        slurm_partition=partition,
        slurm_account=account,
    params:
        code=training_code,
        config=lambda wildcards: config_hash(run_of(wildcards)),
        experiment=config_file,
        arm=lambda wildcards, output: run_of(wildcards).arm.name,
        seed=lambda wildcards, output: run_of(wildcards).seed,
        data=lambda wildcards, input: Path(input.data).parent,
        model=lambda wildcards, input: Path(input.model).parent,
        checkpoints=checkpoints,
        launcher=launcher,
        out=folder,
    shell:
        "{params.launcher}python -m quads.train --experiment {params.experiment} --arm {params.arm} "
        "--seed {params.seed} --data {params.data} --model {params.model} --checkpoints {params.checkpoints} "
        "--out {params.out} 2>&1 | tee -a {log}"


use rule train as train_nodes with:
    wildcard_constraints:
        run=run_pattern(several=True),
    resources:
        mem_mb=memory_mb,
        job_gib=memory_gib,
        cpus_per_task=threads_of,
        runtime=1440,
        slurm_partition=partition,
        slurm_account=account,
        nodes=nodes,
        tasks_per_node=2,
        mpi="srun",
        gres=gres,
        slurm_extra="--exclusive",
