"""Pure decisions: functions of state, event and time, shared by the services and the simulator."""
