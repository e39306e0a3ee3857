"""Data, benchmarks and the warm checkpoint: shared by every arm and seed, named by the hash of what decides them."""


rule prepare:
    input:
        decontaminated_sets,
    output:
        "results/shared/{data}/manifest.json",
    log:
        "results/logs/shared/{data}.log",
    benchmark:
        "results/benchmarks/shared/{data}.tsv"
    params:
        code=code_hash("quads.prepare"),
        experiment=lambda wildcards, output: f"configs/{DATA[wildcards.data]}.yaml",
        out=folder,
    shell:
        "python -m quads.prepare --experiment {params.experiment} --out {params.out} 2>&1 | tee -a {log}"


# Not part of `prepare`: no training result depends on benchmarks, so changing them retrains nothing.
rule make_benchmarks:
    output:
        "results/shared/{benchmarks}/manifest.json",
    log:
        "results/logs/shared/{benchmarks}.log",
    benchmark:
        "results/benchmarks/shared/{benchmarks}.tsv"
    params:
        code=code_hash("quads.make_benchmarks"),
        experiment=lambda wildcards, output: f"configs/{BENCHMARKS[wildcards.benchmarks]}.yaml",
        out=folder,
    shell:
        "python -m quads.make_benchmarks --experiment {params.experiment} --out {params.out} 2>&1 | tee -a {log}"


rule warmup:
    input:
        data=warmup_data,
    output:
        "results/shared/{model}/manifest.json",
    log:
        "results/logs/shared/{model}.log",
    benchmark:
        "results/benchmarks/shared/{model}.tsv"
    threads: 2
    resources:
        mem_mb=4096,
        job_gib=4,
        runtime=240,
        slurm_partition=SITE.partition(gpu=False),
        slurm_account=SITE.account or "",
    params:
        code=code_hash("quads.warmup"),
        experiment=lambda wildcards, output: f"configs/{MODELS[wildcards.model]}.yaml",
        data=lambda wildcards, input: (
            f"--data {Path(input.data[0]).parent}" if input.data else ""
        ),
        out=folder,
    shell:
        "python -m quads.warmup --experiment {params.experiment} {params.data} --out {params.out} "
        "2>&1 | tee -a {log}"
