-- Groups of a training run step by step: how many have a signal (rewards that differ), are all correct or all wrong, and |advantage|.
-- :phase = "train"
-- plot: x=step y=signal,all_correct,all_wrong,mean_abs_advantage

-- The shares are of all groups. A failed grade counts as reward 0, as in training. With --credit turn a group has a signal if the
-- rewards from any turn on differ. mean_abs_advantage is without the groups that --dynamic-sampling dropped.
WITH options AS (
    SELECT
        run_id,
        coalesce((config ->> 'dynamic_sampling')::BOOLEAN, false) AS drops,
        coalesce(config ->> 'credit' = 'turn', false) AS by_turn
    FROM runs
), given AS (  -- the rewards of the turns of an episode; a grader's is that of the last turn, so that each has it still to come
    SELECT
        run_id, step, example_id,
        if(reward IS NULL, [], list_transform(episode.turn_rewards, lambda given: coalesce(given, 0)::DOUBLE)) AS rewards,
        unnest(range(1, 1 + episode.num_turns)) AS turn
    FROM rollouts JOIN options USING (run_id)
    WHERE phase = $phase AND by_turn AND grader = 'environment' AND episode IS NOT NULL
), turns AS (
    SELECT run_id, step, example_id, turn, coalesce(list_sum(rewards[turn:]), 0) AS to_come FROM given
), differing AS (
    SELECT DISTINCT run_id, step, example_id
    FROM (SELECT run_id, step, example_id FROM turns GROUP BY run_id, step, example_id, turn HAVING min(to_come) < max(to_come))
), groups AS (
    SELECT
        run_id,
        step,
        example_id,
        drops,
        count(*) AS samples,
        min(coalesce(reward, 0)) AS least,
        max(coalesce(reward, 0)) AS most,
        count(*) FILTER (reward IS NULL) AS grade_errors,
        sum(abs(advantage)) AS advantage,
        count(advantage) AS advantages
    FROM rollouts JOIN options USING (run_id)
    WHERE phase = $phase
    GROUP BY run_id, step, example_id, drops
), told AS (
    SELECT groups.*, least < most OR differing.run_id IS NOT NULL AS has_signal
    FROM groups LEFT JOIN differing USING (run_id, step, example_id)
)
SELECT
    run_id,
    step,
    count(*) AS groups,
    avg(samples) AS size,
    avg(has_signal::INT) AS signal,
    avg((NOT has_signal)::INT) AS zero_variance,
    avg((least > 0.5)::INT) AS all_correct,
    avg((most <= 0.5)::INT) AS all_wrong,
    sum(advantage) FILTER (has_signal OR NOT drops) / sum(advantages) FILTER (has_signal OR NOT drops) AS mean_abs_advantage,
    sum(grade_errors)::BIGINT AS grade_errors
FROM told
GROUP BY run_id, step
ORDER BY run_id, step;
