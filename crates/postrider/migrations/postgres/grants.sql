-- Postrider: roles for PostgreSQL, each with the rights of its job and no other. Can be run again, and must be after an
-- upgrade of the schema. Run it as the owner of the tables, who also may create roles, with the installation's schema
-- first in the search_path. Then make your own login roles members:
--
--   grant postrider_producer to my_service;
--   grant postrider_relay to my_relay;
--
-- Never give the owner of the tables, or a superuser, to a relay or a service.

begin;

do $$
declare
  name text;
begin
  foreach name in array array['postrider_producer', 'postrider_relay', 'postrider_cleanup', 'postrider_consumer'] loop
    begin
      if to_regrole(name) is null then
        execute format('create role %I nologin', name);
      end if;
    exception when duplicate_object or unique_violation then
      null;                                      -- somebody else has just created it
    end;
    execute format('grant usage on schema %I to %I', current_schema(), name);
  end loop;
end $$;

-- Every program checks the version when it starts.
grant select on postrider_schema to postrider_producer, postrider_relay, postrider_cleanup, postrider_consumer;

-- Services that write messages. They cannot read payloads: a repeat is recognised by id and content_hash, and a message
-- that plain SQL wrote is compared inside the function. The trigger fills the small tables with its owner's rights.
grant insert on outbox to postrider_producer;
grant select (id, message_id, content_hash) on outbox to postrider_producer;
grant execute on function outbox_same_content(text, text, text, text, text, bytea) to postrider_producer;

-- Relays, and operators through "postrider". They never change or delete a message.
grant select on outbox, outbox_status to postrider_relay;
grant select, insert, update, delete on outbox_queue, outbox_waiting, outbox_dead, outbox_relay to postrider_relay;
grant select, insert on outbox_sent, outbox_cancelled, outbox_audit to postrider_relay;
grant select, update on outbox_shard to postrider_relay;

-- Clean-up: deletes what is past its retention. Sees ids and times, no payloads.
grant select (id, message_id, created_at), delete on outbox to postrider_cleanup;
grant select on outbox_queue, outbox_waiting, outbox_dead to postrider_cleanup;
grant select, delete on outbox_sent, outbox_cancelled, inbox to postrider_cleanup;

-- Consumers, in the database of their effects.
grant select, insert on inbox to postrider_consumer;
grant select, insert, update on inbox_dead to postrider_consumer;

commit;
