-- What differs between runs: options, the command, the model's weights, the precision of products, the data and the prompt, each beside the first run's.
-- plot: none

WITH given AS (
    SELECT
        rowid AS place, run_id, config, command, metadata,
        if((SELECT count(*) FROM runs) > 1, '', error('config_diff wants two runs: config_diff RUN_A RUN_B')) AS _
    FROM runs
), facts AS (
    SELECT place, run_id, option.key AS option, option.value ->> '$' AS value FROM given, json_each(config) AS option
    UNION ALL
    SELECT place, run_id, '(command)', command || _ FROM given
    UNION ALL
    SELECT place, run_id, '(model sha256)', left(metadata ->> '$.facts.model.sha256', 16) FROM given
    UNION ALL
    SELECT place, run_id, '(dataset fingerprint)', left(metadata ->> '$.facts.dataset.fingerprint', 16) FROM given
    UNION ALL
    SELECT place, run_id, '(computes in)', metadata ->> '$.policy.compute_dtype' FROM given
    UNION ALL
    SELECT place, run_id, '(prompt sha256)', left(sha256(metadata ->> '$.facts.prompt.text'), 16) FROM given
), first AS (
    SELECT * FROM given WHERE place = 0
), pairs AS (
    SELECT DISTINCT option, first.run_id AS first_run, other.place, other.run_id
    FROM facts, first, given AS other
    WHERE other.place > 0 AND option <> 'run'
)
SELECT
    pairs.option,
    first_run,
    before.value AS first_value,
    pairs.run_id,
    after.value
FROM pairs
LEFT JOIN facts AS before ON before.place = 0 AND before.option = pairs.option
LEFT JOIN facts AS after ON after.place = pairs.place AND after.option = pairs.option
WHERE before.value IS DISTINCT FROM after.value
ORDER BY pairs.place, pairs.option;
