"""pass@1 of a trained run, in the arm's own engine and in a BF16 engine."""


rule evaluate:
    input:
        train="results/{experiment}/train/{run}/result.json",
        # The training result already depends on the data's content; here the files only have to be there.
        data=ancient(data_manifest),
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
        gpu=gpus,
        runtime=240,
    params:
        code=code_hash("quads.evaluate", "quads.integrations.vllm", "quads.rollout"),
        experiment=config_file,
        arm=lambda wildcards, output: run_of(wildcards).arm.name,
        seed=lambda wildcards, output: run_of(wildcards).seed,
        data=lambda wildcards, input: Path(input.data).parent,
        train=lambda wildcards, input: Path(input.train).parent,
        out=folder,
    shell:
        "python -m quads.evaluate --experiment {params.experiment} --arm {params.arm} --seed {params.seed} "
        "--data {params.data} --train {params.train} --out {params.out} 2>&1 | tee -a {log}"
