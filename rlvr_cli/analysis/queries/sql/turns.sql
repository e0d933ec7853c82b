-- Episodes step by step: turns and tokens of the policy, calls of tools, those that failed, how episodes ended, and the reward with and without a call.
-- :phase = null
-- plot: x=step y=reward,turns,tool_calls,failed_share panels=phase

-- A failed grade, such as that of an environment that failed, counts as reward 0.
SELECT
    run_id,
    phase,
    step,
    count(*) AS episodes,
    avg(coalesce(reward, 0)) AS reward,
    avg(episode.num_turns) AS turns,
    avg(episode.num_policy_tokens) AS policy_tokens,
    avg(episode.num_policy_tokens / nullif(num_response_tokens, 0)) AS policy_share,
    avg(episode.tool_calls) AS tool_calls,
    avg((episode.tool_calls > 0)::INT) AS called_share,
    sum(episode.tool_errors) / nullif(sum(episode.tool_calls), 0) AS failed_share,
    avg(coalesce(reward, 0)) FILTER (episode.tool_calls > 0) AS reward_with_call,
    avg(coalesce(reward, 0)) FILTER (episode.tool_calls = 0) AS reward_without,
    sum(episode.forged)::BIGINT AS forged,
    avg((episode.ended_by = 'turns')::INT) AS out_of_turns,
    avg((episode.ended_by = 'length')::INT) AS cut,
    avg((episode.ended_by = 'error')::INT) AS environment_errors,
    avg(episode.environment_seconds) AS environment_seconds
FROM rollouts
WHERE phase = coalesce($phase::VARCHAR, phase) AND episode IS NOT NULL
GROUP BY ALL
ORDER BY run_id, phase, step;
