"""MLflow. Jobs write plain files; these local rules import them, one at a time (resource `mlflow`).

TRAP: eight processes that open a new SQLite store at once race in its migration and seven die. So one rule initialises
it, and its marker, not the database, is the output: Snakemake deletes outputs before it runs a rule again.
TRAP: so a deleted database would leave markers that say that everything is tracked. They are removed before planning
(not by a dry run, which only says so), and the runs are imported again from their files.
"""

from quads.markers import lost_markers

# A job's own process reads this file too, perhaps on a node that does not see the store; so does `snakemake --summary`.
for marker in lost_markers(Path("results")) if plans_only_or_runs() else ():
    if dry_run():
        print(f"{marker}: its store is gone; a real run imports again", file=sys.stderr)
    else:
        print(
            f"{marker}: its store is gone; it will be imported again", file=sys.stderr
        )
        marker.unlink(missing_ok=True)


rule track_init:
    output:
        "results/shared/{store}.json",
    log:
        "results/logs/shared/{store}.log",
    benchmark:
        "results/benchmarks/shared/{store}.tsv"
    resources:
        mlflow=1,
    params:
        experiment=lambda wildcards, output: f"configs/{STORES[wildcards.store]}.yaml",
    shell:
        "python -m quads.track init --experiment {params.experiment} --out {output} 2>&1 | tee -a {log}"


rule track_run:
    input:
        train=train_result,
        evaluation=eval_result,
        store=lambda wildcards: ancient(paths.tracking_marker(experiment_of(wildcards))),
    output:
        "results/{experiment}/mlflow/{run}-{eval_hash}.json",
    log:
        "results/logs/{experiment}/mlflow/{run}-{eval_hash}.log",
    benchmark:
        "results/benchmarks/{experiment}/mlflow/{run}-{eval_hash}.tsv"
    resources:
        mlflow=1,
    params:
        code=code_hash("quads.track", "quads.integrations.mlflow"),
        tracking=lambda wildcards: config_hash(experiment_of(wildcards).tracking),
        experiment=config_file,
        arm=lambda wildcards, output: run_of(wildcards).arm.name,
        seed=lambda wildcards, output: run_of(wildcards).seed,
        train=lambda wildcards, input: Path(input.train).parent,
        evaluation=lambda wildcards, input: Path(input.evaluation).parent,
    shell:
        "python -m quads.track log --experiment {params.experiment} --arm {params.arm} --seed {params.seed} "
        "--train {params.train} --eval {params.evaluation} --out {output} 2>&1 | tee -a {log}"
